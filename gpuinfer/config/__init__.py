"""What a run is asked to do: the plugins there are, their options, the settings that are merged from everywhere."""
