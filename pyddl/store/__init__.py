"""What a run leaves on disk: the tape, checkpoints, learners' states, its lock, exports."""
