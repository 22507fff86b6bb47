"""The web page over run directories: a server on the loopback interface, and the page itself as plain modules."""
