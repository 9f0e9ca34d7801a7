"""Between sockets and routes: connections, bounded bodies, one id a request, turns of the loop, what is unread."""
