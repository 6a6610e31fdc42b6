#!/bin/sh
# The agent of the soak without an SDK: POSIX sh and curl. Its journey is a step, a signal and an effect whose provider can be asked.
# The answers are those of the agent in Python, so that one checker reads both.

set -eu

API="http://127.0.0.1:${PERDURE_PORT:-4555}/v1"

send() {
    curl --silent --show-error --fail --max-time 90 "$@"
}

# post PATH BODY: one operation under one request id, however often curl has to send it.
post() {
    id=$(cat /proc/sys/kernel/random/uuid)
    send "$API/$1" --retry 10 --retry-connrefused --header "Perdure-Request-Id: $id" --header 'Content-Type: application/json' --data-binary "$2"
}

field() {
    tr -d '\n' | sed -n 's/.*"'"$1"'": *"\{0,1\}\([^",}]*\).*/\1/p'
}

part() {
    printf %s "$context" | tr -d '\n' | sed -n "s/.*$1.*/\1/p"
}

moment() {
    if [ "$freeze" = "$1" ]; then
        send "$SOAK_HARNESS/moments" --data-binary '{"identity":"'"$path/a2"'","moment":"'"$1"'","pid":'$$'}' >/dev/null
    fi
}

until context=$(curl --silent --fail --max-time 60 --retry 10 --retry-connrefused "$API/run?timeout=30") && [ -n "$context" ]; do
    case $? in 1) ;; 22) exit 0 ;; *) exit 1 ;; esac
done
path=$(part '"path":"\([^"]*\)"')
amount=$(part '"do":"step","part":"a0","amount":\([0-9]*\)')
name=$(part '"do":"signal","part":"a1","names":\["\([a-z]*\)"')
freeze=$(part '"freeze":"\([a-z]*\)"')
about='"run":"'"$(printf %s "$context" | field runId)"'","attempt":'"$(printf %s "$context" | field attempt)"

decision=$(post steps/begin '{"name":"count","key":"step:count=a0"}')
if [ "$(printf %s "$decision" | field decision)" = execute ]; then
    nonce=$(tr -d '-' </proc/sys/kernel/random/uuid)
    send "$SOAK_WORLD/steps" --data-binary '{"identity":"'"$path/a0"'","nonce":"'"$nonce"'",'"$about"'}' >/dev/null
    post steps/end '{"key":"step:count=a0","name":"count","output":"'"$nonce"'"}' >/dev/null
else
    nonce=$(printf %s "$decision" | field output)
fi

answer=$(post waits '{"key":"wait:'"$name"'=a1","name":"'"$name"'","on":[{"kind":"signal","name":"'"$name"'"}],"suspend":true}')
case $answer in *'"suspended"'*) exit 0 ;; esac
signal=$(printf %s "$answer" | field id)
came=$(printf %s "$answer" | field amount)

arguments='{"identity":"'"$path/a2"'"}'
begin='{"tool":"shell_query","effect":"external","scope":["identity"],"onUnknown":"query","timeoutSeconds":2,"maxRetries":20,"arguments":'"$arguments"'}'
decision=$(post activities/begin "$begin")
while :; do
    key=$(printf %s "$decision" | field key)
    pause=$(printf %s "$decision" | field retryAfterSeconds)
    sleep "${pause:-0}"
    case $(printf %s "$decision" | field decision) in
        receipt)
            ref=$(printf %s "$decision" | field response)
            break
            ;;
        execute | retry)
            token=$(printf %s "$decision" | field token)
            moment before
            state=unknown
            order='{"identity":"'"$path/a2"'","policy":"query","freeze":"'"$freeze"'","key":"'"$key"'","pid":'$$','"$about"'}'
            if done=$(send "$SOAK_WORLD/effects" --data-binary "$order"); then
                state=succeeded
            fi
            ref=$(printf %s "${done:-}" | field ref)
            moment after
            post activities/end '{"key":"'"$key"'","token":"'"$token"'","state":"'"$state"'","response":"'"$ref"'"}' >/dev/null
            decision=$(post activities/begin "$begin")
            ;;
        unknown)
            # Who asks before the old executor has ended hears what there is, not what will be: begin again after that.
            case ${pause:-0} in
                0 | 0.0)
                    status=$(curl --silent --output /dev/null --write-out '%{http_code}' --max-time 30 "$SOAK_WORLD/effects/$key")
                    case $status in
                        200)
                            ref=$(send "$SOAK_WORLD/effects/$key" | field ref)
                            decision=$(post activities/resolve '{"key":"'"$key"'","happened":true,"response":"'"$ref"'"}')
                            ;;
                        404) decision=$(post activities/resolve '{"key":"'"$key"'","happened":false}') ;;
                        *) decision=$(post activities/begin "$begin") ;;
                    esac
                    ;;
                *) decision=$(post activities/begin "$begin") ;;
            esac
            ;;
        busy) decision=$(post activities/begin "$begin") ;;
        *) exit 1 ;;
    esac
done

items='[{"nonce":"'"$nonce"'"},{"got":[{"name":"'"$name"'","id":"'"$signal"'","amount":'"$came"'}]},{"ref":"'"$ref"'"}]'
post finish '{"outcome":"succeeded","output":{"items":'"$items"',"trail":["'"$nonce"'"],"value":'$((amount + came))'}}' >/dev/null
