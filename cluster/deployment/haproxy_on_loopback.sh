#!/bin/sh
# HAProxy as Ray Serve starts it, for a Ray that keeps to its machine (ray_access.py beside this): before it reads the
# configuration that Ray wrote, its statistics and metrics are put on loopback, and its admin socket is closed to other
# users. Ray's template (2.60) has a setting for neither.
set -eu
previous=
for argument; do
  if [ "$previous" = -f ]; then
    sed -i \
      -e "s/^\( *bind \)\*\{0,1\}:\($RAY_SERVE_HAPROXY_STATS_PORT\|$RAY_SERVE_HAPROXY_METRICS_PORT\) *\$/\1127.0.0.1:\2/" \
      -e 's/^\( *stats socket .*\) mode 666 /\1 mode 600 /' \
      "$argument"
  fi
  previous=$argument
done
# Where whoever started it is killed, it stops by itself: it listens no more, ends what it has, and is gone. It would
# stay for ever, and share the port with the next one, of another cluster.
if setpriv --help 2>/dev/null | grep -q pdeathsig; then
  exec setpriv --pdeathsig USR1 "$LEGATO_HAPROXY" "$@"
fi
exec "$LEGATO_HAPROXY" "$@"
