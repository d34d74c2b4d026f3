"""How processes of gpuinfer are started: as children of this process, as jobs of SLURM, as actors of Ray."""
