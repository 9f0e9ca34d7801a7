#!/bin/sh
# HAProxy as Ray Serve starts it, for a Ray that keeps to its machine (ray_access.py beside this): before it reads the
# configuration that Ray wrote, its statistics and metrics are put on loopback, its admin socket is closed to other
# users, a client that does not send its headers is given up after a while, and requests are not spliced: where they are,
# HAProxy (2.8) runs in circles from when a client leaves until its answer goes on or ends. Ray's template (2.60) has a
# setting for none of these.
set -eu
previous=
for argument; do
  if [ "$previous" = -f ]; then
    sed -i \
      -e "s/^\( *bind \)\*\{0,1\}:\($RAY_SERVE_HAPROXY_STATS_PORT\|$RAY_SERVE_HAPROXY_METRICS_PORT\) *\$/\1127.0.0.1:\2/" \
      -e 's/^\( *stats socket .*\) mode 666 /\1 mode 600 /' \
      -e '/^ *option splice-request$/d' \
      -e 's/^defaults$/defaults\n    timeout http-request 30s/' \
      "$argument"
  fi
  previous=$argument
done
exec "$LEGATO_HAPROXY" "$@"
