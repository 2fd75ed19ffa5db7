"""`treeline bench programs`: programs of the frontend language on our server, and the value of each part."""
