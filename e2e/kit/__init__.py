"""The building blocks of journeys: the cluster, Treeline in it, and traffic through it."""
