"""The built-in decoders, a file each, registered under `gpuinfer.decoders` like anyone's."""
