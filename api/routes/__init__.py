"""One module for each kind of thing; together they are the HTTP surface."""
