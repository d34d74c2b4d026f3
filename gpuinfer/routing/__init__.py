"""Which replica a request goes to: policies that the router and the simulator share."""
