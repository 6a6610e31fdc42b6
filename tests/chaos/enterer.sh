#!/bin/sh
# The agent `enterer` without an SDK: begins a call, waits at the door, and calls. What nobody knows it asks of the sink.

set -eu

API="http://127.0.0.1:$PERDURE_PORT/v1"
post() { curl --silent --show-error --fail --max-time 60 --retry 10 --retry-connrefused "$API/$1" --data-binary "$2"; }
field() { tr -d '\n' | sed -n 's/.*"'"$1"'": *"\{0,1\}\([^",}]*\).*/\1/p'; }

until context=$(curl --silent --fail --max-time 60 --retry 10 --retry-connrefused "$API/run?timeout=30") && [ -n "$context" ]; do
    case $? in 1) ;; *) exit 0 ;; esac
done
what=$(printf %s "$context" | field what)
begin='{"tool":"enter","effect":"external","scope":["what"],"onUnknown":"query","timeoutSeconds":3,"arguments":{"what":"'"$what"'"}}'
decision=$(post activities/begin "$begin")
while :; do
    key=$(printf %s "$decision" | field key)
    token=$(printf %s "$decision" | field token)
    pause=$(printf %s "$decision" | field retryAfterSeconds)
    policy=$(printf %s "$decision" | field policy)
    verdict=$(printf %s "$decision" | field decision)
    [ "$verdict" = unknown ] || sleep "${pause:-0}"
    case $verdict in
        receipt) break ;;
        execute | retry)
            curl --silent --max-time 60 "$CHAOS_SINK/doors/$what" >/dev/null
            curl --silent --max-time 60 "$CHAOS_SINK/effects/$key" --data-binary '{"what":"'"$what"'","part":"enter"}' >/dev/null
            post activities/end '{"key":"'"$key"'","token":"'"$token"'","state":"succeeded","response":"ref-enter"}' >/dev/null
            decision=$(post activities/begin "$begin")
            ;;
        unknown)
            if [ "$policy" = ask ]; then
                answer=$(post waits '{"key":"wait:person#0","on":[{"kind":"signal","name":"effect:'"$key"':1"}],"suspend":true}')
                case $answer in *'"suspended"'*) exit 0 ;; esac
                happened=$(printf %s "$answer" | sed -n 's/.*"happened": *\([a-z]*\).*/\1/p')
                decision=$(post activities/resolve '{"key":"'"$key"'","happened":'"$happened"',"response":"ref-enter","by":"person"}')
            elif [ "${pause:-0}" != 0 ]; then
                sleep 1
                decision=$(post activities/begin "$begin")
            elif curl --silent --fail --max-time 60 "$CHAOS_SINK/effects/$key" >/dev/null; then
                decision=$(post activities/resolve '{"key":"'"$key"'","happened":true,"response":"ref-enter"}')
            else
                decision=$(post activities/resolve '{"key":"'"$key"'","happened":false}')
                case $(printf %s "$decision" | field decision)$(printf %s "$decision" | field policy) in
                    unknownquery) decision=$(post activities/begin "$begin") ;;
                esac
            fi
            ;;
        *) sleep 1; decision=$(post activities/begin "$begin") ;;
    esac
done
post finish '{"outcome":"succeeded","output":"ref-enter"}' >/dev/null
