"""Status: what is true of pools and models, said in the words of `api.conditions`. Pure, as the planner is."""
