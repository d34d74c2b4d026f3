"""What `import gpuinfer` offers, over the engine, the backends and the strategies that the commands use."""
