"""Grammars: from what an output must be to the tokens that it may go on with."""
