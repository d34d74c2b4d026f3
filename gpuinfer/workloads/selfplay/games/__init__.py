"""The built-in games, registered like anyone's."""
