"""Simulated engines, and a simulated fleet to which the picker's own code routes: `treeline sim`."""
