"""`treeline bench programs`: programs of the frontend language on our server, and what each of its parts is worth."""
