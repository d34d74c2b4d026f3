"""How replicas come about: as children of this process, as jobs of SLURM, as actors of Ray."""
