"""Grammars: from the form of an output to the tokens allowed next."""
