"""The lab: faults with known causes, injected so that the diagnosis can be scored against the truth."""
