#!/usr/bin/env bash
# Asks several questions at once on top of one snapshot: forks it, generates from all children together, drops them.
#
#   branches.sh PARENT QUESTION...
#
# PARENT    id of a snapshot that ends in a finished answer
#
# An answer is cut off at 128 tokens.
# KVFORK is the server's address, 127.0.0.1:50051 if unset. Exits as grpcurl does: 0, or 64 + the status code.
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

call() { # METHOD, the request on stdin
  grpcurl -plaintext -d @ "${KVFORK:-127.0.0.1:50051}" "kvfork.v1.$1"
}

# A short time to live, for the case that this script does not reach its end.
fork='
import json, sys

parent, *questions = sys.argv[1:]
turns = [{"chat": {"messages": [{"role": "ROLE_USER", "parts": [{"text": text}]}]}} for text in questions]
branches = [{"append": turn, "options": {"ttl": "600s"}} for turn in turns]
print(json.dumps({"parent": f"snapshots/{parent}", "branches": branches}))
'
names='
import json, sys

print(*(snapshot["name"] for snapshot in json.load(sys.stdin)["snapshots"]))
'
answer='
import json, re, sys

print("".join(json.loads(text) for text in re.findall(r"""^    "text": (".*")""", sys.stdin.read(), re.MULTILINE)))
'

forked=$(python3 -c "$fork" "$@" | call InferenceService/Fork)
children=$(python3 -c "$names" <<<"$forked")
answers=$(mktemp -d)
drop() {
  for child in $children; do
    printf '{"name": "%s", "allow_missing": true}' "$child" | call SnapshotService/DeleteSnapshot >/dev/null
  done
  rm -r "$answers"
}
trap drop EXIT

jobs=
for child in $children; do
  printf '{"parent": "%s", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 128}}' "$child" |
    call InferenceService/Generate >"$answers/${child#snapshots/}" &
  jobs="$jobs $!"
done
for job in $jobs; do wait "$job"; done # in turn, so that the first failure's exit code is this script's

shift
for child in $children; do
  printf '%s\n  ' "$1"
  python3 -c "$answer" <"$answers/${child#snapshots/}"
  shift
done
