"""What journeys are made of: the cluster in their hands, Treeline in it, and traffic through it."""
