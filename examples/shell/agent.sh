#!/bin/sh
# A durable agent without an SDK: POSIX sh and curl on the loopback API of the sidecar.
#
# It measures how full the disk is (a step), waits for the signal "approved" with no process alive, and reports the number to
# a webhook (an effect with a receipt). It may be killed anywhere: it starts from the top, and what is done is not done again.

set -eu

API="http://127.0.0.1:${PERDURE_PORT:-4555}/v1"

# send URL [OPTION...]: curl, quiet about success, loud about failure.
send() {
    curl --silent --show-error --fail --max-time 60 "$@"
}

# post PATH BODY: one operation; prints the answer, which comes only after the commit. The request id stays the same when curl tries
# again, so an operation whose answer was lost is not taken for a second one. A refusal (this run has another holder) ends the script.
post() {
    id=$(cat /proc/sys/kernel/random/uuid 2>/dev/null || uuidgen)
    send "$API/$1" --retry 10 --retry-connrefused --header "Perdure-Request-Id: $id" --header 'Content-Type: application/json' \
        --data-binary "$2"
}

# field NAME: the string or number under NAME in the JSON on standard input; the last one, if there are several.
field() {
    tr -d '\n' | sed -n 's/.*"'"$1"'": *"\{0,1\}\([^",}]*\).*/\1/p'
}

say() {
    echo "agent.sh: $*" >&2
}

# leave CODE: ends this process. On a cluster the kubelet does that: one that ends by itself in the same moment can hold its pod up.
leave() {
    if [ "${PERDURE_AWAIT_SIGTERM:-}" = true ]; then
        trap 'exit 0' TERM
        sleep 5 &
        wait
    fi
    exit "$1"
}

# Blocks until this worker holds a run. An empty answer means not yet, a refusal (curl's 22) that no run will come. Silent, because the
# sidecar may not listen yet when this starts.
until context=$(curl --silent --fail --max-time 60 --retry 10 --retry-connrefused "$API/run?timeout=30") && [ -n "$context" ]; do
    case $? in 1) ;; 22) leave 0 ;; *) say "no sidecar at $API"; exit 1 ;; esac
done
url=$(printf %s "$context" | field notifyUrl)
say "run $(printf %s "$context" | field runId), attempt $(printf %s "$context" | field attempt)"

# A step: measured once, then always the same number.
decision=$(post steps/begin '{"name":"measure"}')
if [ "$(printf %s "$decision" | field decision)" = execute ]; then
    used=$(df -P / | awk 'NR == 2 { print $5 + 0 }')
    key=$(printf %s "$decision" | field key)
    post steps/end '{"key":"'"$key"'","name":"measure","output":{"usedPercent":'"$used"'}}' >/dev/null
    say "measured $used %"
else
    used=$(printf %s "$decision" | field usedPercent)
    say "measured before: $used %"
fi

# A wait: "suspended" means that the run has let this process go. After the signal another process starts from the top and is told
# "done" here.
answer=$(post waits '{"key":"wait:approved#0","name":"approved","on":[{"kind":"signal","name":"approved"}],"suspend":true}')
case $answer in
    *'"suspended"'*) say "suspended"; leave 0 ;;
esac

# An effect: the intent is committed before the call is made, the receipt after it. When nobody knows whether an earlier call
# arrived, the receiver is asked by key. Many retries, so that the receiver may be started later than the run.
event='{"event":"disk","usedPercent":'"$used"'}'
begin='{"tool":"notify","effect":"external","scope":["event"],"onUnknown":"query","timeoutSeconds":20,"maxRetries":20,"arguments":'"$event"'}'
decision=$(post activities/begin "$begin")
while :; do
    key=$(printf %s "$decision" | field key)
    pause=$(printf %s "$decision" | field retryAfterSeconds)
    verdict=$(printf %s "$decision" | field decision)
    # How long until the call, or, when it is unknown, until nobody expects that the old worker will be proven gone: that may come sooner.
    [ "$verdict" = unknown ] || sleep "${pause:-0}"
    case $verdict in
        receipt)
            say "the webhook has it"
            break
            ;;
        execute | retry)
            status=0
            send "$url" --header "Idempotency-Key: $key" --header 'Content-Type: application/json' --data-binary "$event" \
                --output /dev/null || status=$?
            case $status in
                0) state=succeeded ;;
                6 | 7) state=failed ;; # no connection was made: proven not executed
                *) state=unknown ;;
            esac
            token=$(printf %s "$decision" | field token)
            post activities/end '{"key":"'"$key"'","token":"'"$token"'","state":"'"$state"'","response":'"$event"'}' >/dev/null
            say "webhook: $state"
            decision=$(post activities/begin "$begin")
            ;;
        unknown)
            if [ "$(printf %s "$decision" | field policy)" = ask ]; then
                # The receiver does not have it, and nothing proves that the worker that was about to call it is gone: a person decides.
                attempt=$(printf %s "$decision" | field attempt)
                signal="effect:$key:${attempt:-1}"
                answer=$(post waits '{"key":"wait:'"$signal"'","name":"'"$signal"'","on":[{"kind":"signal","name":"'"$signal"'"}],"suspend":true}')
                case $answer in
                    *'"suspended"'*) say "a person must say whether the webhook has it; suspended"; leave 0 ;;
                esac
                found=$(printf %s "$answer" | tr -d '\n' | sed -n 's/.*"happened": *\([a-z]*\).*/\1/p')
                say "a person says whether the webhook has it: $found"
                decision=$(post activities/resolve '{"key":"'"$key"'","happened":'"$found"',"by":"person","response":'"$event"'}')
            # No answer says nothing: then it is asked again, for as long as it takes.
            elif known=$(send "$url?key=$key"); then
                case $known in *"$key"*) found=true ;; *) found=false ;; esac
                say "nobody knows whether the webhook has it; it says: $found"
                decision=$(post activities/resolve '{"key":"'"$key"'","happened":'"$found"'}')
                if [ "$(printf %s "$decision" | field decision) $(printf %s "$decision" | field policy)" = "unknown query" ]; then
                    # A no counts only from who was asked when the old worker was known to be gone; "begin" says since when that is.
                    sleep 1
                    decision=$(post activities/begin "$begin")
                fi
            else
                say "nobody knows whether the webhook has it, and it does not answer"
                sleep 5
                decision=$(post activities/begin "$begin")
            fi
            ;;
        busy)
            sleep 1
            decision=$(post activities/begin "$begin")
            ;;
        failed)
            message="the webhook $url could not be reached, and all retries are used up"
            say "$message"
            post finish '{"outcome":"failed","error":{"type":"NotifyFailed","message":"'"$message"'","retryable":false}}' >/dev/null
            leave 1
            ;;
        *)
            say "refused: $decision"
            message="the call of the webhook was answered: $(printf %s "$decision" | field decision)"
            post finish '{"outcome":"failed","error":{"type":"NotifyRefused","message":"'"$message"'","retryable":false}}' >/dev/null
            leave 1
            ;;
    esac
done

post finish '{"outcome":"succeeded","output":{"usedPercent":'"$used"'}}' >/dev/null
say "finished"
leave 0
