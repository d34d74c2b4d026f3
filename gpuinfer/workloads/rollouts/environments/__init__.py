"""The built-in environments, registered like anyone's."""
