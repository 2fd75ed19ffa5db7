"""Simulated engines, and a fleet of them in simulated time that the picker's own core routes to: `treeline sim`."""
