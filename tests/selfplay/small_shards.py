"""The command, but with shards of half a megabyte: a short run writes many."""

from gpuinfer.workloads.selfplay import game_records

game_records.SHARD_BYTES = 1 << 19  # in the workers too: they import this module as their parent's main one

if __name__ == "__main__":
    from gpuinfer.cli import main

    main()
