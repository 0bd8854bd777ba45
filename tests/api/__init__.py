"""The API over a real socket, the client, the command line, and `trainshed serve`."""
