"""What runs: learners, the syncer, the set-up of a run, launchers and guards."""
