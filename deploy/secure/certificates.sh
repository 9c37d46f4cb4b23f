#!/bin/sh
# Make an authority of your own and a certificate for the NATS server. Needs openssl 1.1.1 or newer.
#   certificates.sh FOLDER HOST...       the names and addresses that clients reach the server by
#   certificates.sh FOLDER --client NAME a certificate for a client, where the server asks for one
# The authority is made once and kept: `ca.key` stays on the machine that signs, `ca.pem` goes to every client.
set -eu
umask 077
days=${DAYS:-365}
if [ $# -lt 2 ]; then
  sed -n '2,5s/^# //p' "$0" >&2
  exit 2
fi
folder=$1
shift
mkdir -p "$folder"

key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }

if [ ! -e "$folder/ca.pem" ]; then
  key "$folder/ca.key"
  openssl req -x509 -new -key "$folder/ca.key" -out "$folder/ca.pem" -days 3650 -subj "/CN=Trine NATS authority" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

sign() { # NAME PURPOSE EXTRA
  key "$folder/$1.key"
  openssl req -new -key "$folder/$1.key" -subj "/CN=$1" -out "$folder/$1.csr"
  cat >"$folder/$1.ext" <<END
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
extendedKeyUsage=$2
$3
END
  openssl x509 -req -in "$folder/$1.csr" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -CAcreateserial \
    -days "$days" -extfile "$folder/$1.ext" -out "$folder/$1.pem" 2>/dev/null
  rm "$folder/$1.csr" "$folder/$1.ext"
}

if [ "$1" = --client ]; then
  sign "$2" clientAuth ""
  exit
fi
names=
for host in "$@"; do
  case $host in
    *:*) kind=IP ;;
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
  esac
  names="$names${names:+,}$kind:$host"
done
# The servers of a cluster are clients of each other.
sign server serverAuth,clientAuth "subjectAltName=$names"
