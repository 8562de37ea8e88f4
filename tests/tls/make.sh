#!/bin/sh
# Makes the certificates of this folder anew: an authority, a server on loopback and a client, valid for a hundred years.
# The authority's key isn't kept. They are for tests alone.
set -eu
cd "$(dirname "$0")"
key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
openssl req -x509 $key -days 36500 -subj "/CN=Pagemill tests" -keyout ca.key -out ca.pem
for name in server client; do
  openssl req $key -subj "/CN=$name" -keyout "$name.key" -out "$name.csr"
  printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\nkeyUsage=digitalSignature\n' |
    openssl x509 -req -days 36500 -in "$name.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -extfile /dev/stdin -out "$name.pem"
done
rm -f ca.key ca.srl ./*.csr
