#!/usr/bin/env bash
# A whole federation on this machine: one SuperLink and ten SuperNodes as processes of their own on 127.0.0.1, with TLS,
# node authentication, and a roster of the silos. Runs the app once and ends everything. Arguments go to `flwr run`:
#   ./deploy.sh --run-config "rounds=5"
set -euo pipefail
cd "$(dirname "$0")"
silos=10 port=${PORT:-9092}
folder=$(mktemp -d)
# Nothing is sent anywhere, and nothing is installed while the app runs.
export FLWR_HOME="$folder/home" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
# Whatever ends this script ends all it has started, first politely, then by force. Some of Flower's processes leave their
# process group, and outlive those that started them; all of them have our FLWR_HOME in their environment.
set -m
groups=()
ours() (
  home=$FLWR_HOME
  unset FLWR_HOME # or those who look would find themselves
  if [[ -d /proc/self ]]; then grep -lzxF "FLWR_HOME=$home" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; fi
)
cleanup() {
  local signal group pid
  trap - EXIT INT TERM HUP
  for signal in TERM KILL KILL; do
    for group in "${groups[@]}"; do kill "-$signal" -- "-$group" 2>/dev/null || true; done
    for pid in $(ours); do kill "-$signal" "$pid" 2>/dev/null || true; done
    for _ in {1..50}; do [[ -z $(ours) ]] && break; sleep 0.1; done
  done
  rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# 1. A certificate authority of our own, and a certificate for the SuperLink.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj "/CN=digits authority" \
  -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=127.0.0.1" \
  -keyout "$folder/server.key" -out "$folder/server.csr" 2>/dev/null
openssl x509 -req -in "$folder/server.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -days 30 \
  -extfile <(echo "subjectAltName=IP:127.0.0.1
authorityKeyIdentifier=keyid") -out "$folder/server.crt" 2>/dev/null

# 2. The SuperLink, which lets in only SuperNodes whose keys are registered.
mkdir "$folder/home"
cat > "$folder/home/config.toml" <<TOML
[superlink]
default = "digits"

[superlink.digits]
address = "127.0.0.1:$port"
root-certificates = "$folder/ca.crt"
TOML
flower-superlink --host 127.0.0.1 --port "$port" --enable-supernode-auth --ssl-ca-certfile "$folder/ca.crt" \
  --ssl-certfile "$folder/server.crt" --ssl-keyfile "$folder/server.key" > "$folder/superlink.log" 2>&1 &
groups+=($!) && disown
until (exec 3<> "/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
  kill -0 "${groups[0]}" 2>/dev/null || { cat "$folder/superlink.log"; exit 1; }
  sleep 0.5
done

# 3. Each silo makes an identity, and the silos tell each other the public lines, not through the server: the roster.
for ((silo = 0; silo < silos; silo++)); do
  cpsgd round identity create "$folder/silo-$silo.identity" --name "silo $silo" >> "$folder/roster"
done

# 4. Each silo makes a key pair for the SuperLink, has the public half registered, and starts its SuperNode. Its memory,
#    in which it counts the rounds it has answered over all runs, belongs where it stays; here it goes with everything.
for ((silo = 0; silo < silos; silo++)); do
  ssh-keygen -q -t ecdsa -b 384 -N "" -f "$folder/silo-$silo"
  flwr supernode register "$folder/silo-$silo.pub" digits
  flower-supernode --superlink "127.0.0.1:$port" --root-certificates "$folder/ca.crt" \
    --auth-supernode-private-key "$folder/silo-$silo" --port $((port + 1 + silo)) \
    --node-config "partition-id=$silo cpsgd-memory=\"$folder/silo-$silo.memory\" \
      cpsgd-identity=\"$folder/silo-$silo.identity\" cpsgd-roster=\"$folder/roster\"" > "$folder/silo-$silo.log" 2>&1 &
  groups+=($!) && disown
done

# 5. The run, as a job of its own so that this script hears signals meanwhile.
flwr run . digits --stream --run-config "roster=\"$folder/roster\"" "$@" &
groups+=($!)
wait $!
