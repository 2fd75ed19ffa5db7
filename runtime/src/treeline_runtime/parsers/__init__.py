"""From an output's text to its parts: what was thought, said, and which tools are called."""
