"""The composition root: configuration, gateway, global scheduler, Ray Serve application, command line."""
