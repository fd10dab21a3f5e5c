"""The flow of a run: its stages as coroutines over facts."""
