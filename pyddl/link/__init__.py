"""Mailboxes and how they are reached: memory layout, the syncer's port, the learner's link thread, MPI."""
