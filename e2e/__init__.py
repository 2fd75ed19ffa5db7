"""End-to-end tests: a cluster, and the journeys of users through it."""
