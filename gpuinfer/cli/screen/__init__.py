"""What people read while a run goes on and when it is over, as words and numbers; `display` draws it."""
