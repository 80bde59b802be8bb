#!/bin/sh
# Gets what a Kubernetes takes from Debian 12, and builds it there: fetch_and_build.sh FOLDER, an empty one. Nothing of it
# is installed. Debian has Kubernetes 1.20 as a source package alone, with all that it is built of; etcd, containerd and
# the rest as programs; and a newer kubectl in its next release, by which kustomizations are read.
set -eu
folder=$(realpath "$1")
. /etc/os-release
[ "$ID $VERSION_ID" = "debian 12" ] || { echo "Kubernetes is built from Debian 12's packages, and this is $PRETTY_NAME." >&2; exit 1; }

mkdir -p "$folder/apt/lists/partial" "$folder/debs" "$folder/source" "$folder/root" "$folder/newer" "$folder/bin"
from="$folder/apt/sources.list"
apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' |
    sed -n 's/^\(.*\)$/deb \1\ndeb-src \1/p' >"$from"
sed -n 's/^\(deb .*\) bookworm main$/\1 trixie main/p' "$from" >"$from.newer"
cat "$from.newer" >>"$from"
apt() {
    apt-get -qq -o APT::Sandbox::User=root -o Dir::Etc::sourcelist="$from" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$folder/apt/lists" "$@"
}
apt update
cd "$folder/debs"
apt -t bookworm download golang-1.19-go golang-1.19-src rsync libxxhash0 libpopt0 \
    containerd containernetworking-plugins etcd-server kubernetes-client runc
for deb in *.deb; do dpkg-deb --extract "$deb" "$folder/root"; done
apt download kubectl/trixie
dpkg-deb --extract kubectl_*.deb "$folder/newer"
cd "$folder/source"
apt source --download-only kubernetes/bookworm
dpkg-source --no-check --extract ./*.dsc tree >/dev/null 2>&1

# As Debian builds it.
export GOROOT="$folder/root/usr/lib/go-1.19" GOPATH="$folder/source/tree/.go" HOME="$folder/source/home"
export PATH="$GOROOT/bin:$folder/root/usr/bin:/usr/bin:/bin" LD_LIBRARY_PATH="$folder/root/usr/lib/$(uname -m)-linux-gnu"
export CGO_ENABLED=0 GOPROXY=off
export KUBE_GIT_TREE_STATE=archive KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 KUBE_GIT_COMMIT=debian
mkdir -p "$HOME" "$GOPATH/src/k8s.io"
ln -s ../../.. "$GOPATH/src/k8s.io/kubernetes"
cd "$GOPATH/src/k8s.io/kubernetes"
make WHAT="cmd/kube-apiserver cmd/kube-controller-manager cmd/kube-scheduler cmd/kubelet" >"$folder/build.log" 2>&1 ||
    { tail -n 30 "$folder/build.log" >&2; exit 1; }

cd "$folder"
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
    cp "source/tree/_output/bin/$program" bin
done
for program in containerd containerd-shim-runc-v2 ctr etcd kubectl runc; do
    cp -L "root/usr/bin/$program" bin
done
cp newer/usr/bin/kubectl bin/newer-kubectl
mv root/usr/lib/cni cni
chmod -R u+w source # Go's folders
rm -rf apt debs source root newer
