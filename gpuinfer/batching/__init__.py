"""The parts of the engine, one idea each: who may wait, when a batch is cut, how its requests are settled."""
