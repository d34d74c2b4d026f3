"""What a run does: the plugins there are, their options, the settings that are merged from everywhere."""
