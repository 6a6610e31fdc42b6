#!/bin/sh
# Postgres for a first try of the chart, as PID 1 of its container. Not for production: one server, no backups, no replica.
#
# The data folder is made the first time. The password is what POSTGRES_PASSWORD says at every start, because data outlives the Secret
# that named it. The server replaces this shell, so the container's signals are its own; the image asks for SIGINT, its fast shutdown.
set -eu
: "${POSTGRES_PASSWORD:?set POSTGRES_PASSWORD}" "${PGDATA:?set PGDATA}"
umask 077
export LC_ALL=C TZ=UTC

if [ ! -e "$PGDATA/PG_VERSION" ]; then
    # Made beside and renamed, so that an interrupted first start leaves nothing half made.
    rm -rf "$PGDATA.new"
    initdb -D "$PGDATA.new" -U postgres --auth-local=reject --auth-host=scram-sha-256 \
        --encoding=UTF8 --locale=C --locale-provider=builtin --builtin-locale=C.UTF-8
    echo 'host all all all scram-sha-256' >> "$PGDATA.new/pg_hba.conf"
    mv "$PGDATA.new" "$PGDATA"
fi
# Nothing else can run in this container: a lock file is from a life that was cut off.
rm -f "$PGDATA/postmaster.pid"

quoted=$(printf %s "$POSTGRES_PASSWORD" | sed "s/'/''/g")
printf "alter user postgres password '%s'\n" "$quoted" | postgres --single -D "$PGDATA" postgres > /dev/null
unset POSTGRES_PASSWORD quoted

exec postgres -D "$PGDATA" -c listen_addresses='*' -c port="${PGPORT:-5432}" -c unix_socket_directories= \
    -c timezone=UTC -c log_timezone=UTC -c max_connections=200
