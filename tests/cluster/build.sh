#!/bin/bash
# build.sh DIR: kube-apiserver, kube-controller-manager, kube-scheduler and kubelet in DIR/bin, from the source package that
# this machine's own Debian archive carries. Nothing is installed outside DIR but Debian packages. Does nothing when DIR/bin is there.
set -euo pipefail
dir=$(realpath -m "$1")
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet)
missing=0
for program in "${programs[@]}"; do [ -x "$dir/bin/$program" ] || missing=1; done
[ $missing = 1 ] || exit 0

mkdir -p "$dir"/apt/lists/partial "$dir"/apt/cache/archives/partial "$dir"/bin "$dir"/home
cd "$dir"
packages=(golang-go golang-github-modern-go-reflect2-dev make rsync gcc libc6-dev openssl iproute2 dnsmasq-base
          etcd-server kubernetes-client containerd runc containernetworking-plugins)
dpkg -s "${packages[@]}" > /dev/null 2>&1 || {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}" > apt/install.log 2>&1 || {
    tail -5 apt/install.log >&2; echo "packages are missing: ${packages[*]}" >&2; exit 1; }; }

# The archive's address and suite, as the machine's own sources name them.
archive=$(apt-get indextargets --format '$(SITE) $(RELEASE)' 'Created-By: Packages' | grep -v security | grep -vE -- '-(updates|backports)$' | head -1)
read -r site suite <<< "$archive"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb-src [signed-by=$keyring] $site $suite main" > apt/sources.list
options=(-o "Dir::Etc::sourcelist=$dir/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
         -o "Dir::State::Lists=$dir/apt/lists" -o "Dir::Cache=$dir/apt/cache")
apt-get "${options[@]}" update -qq
ls kubernetes_*.orig.tar.gz > /dev/null 2>&1 || apt-get "${options[@]}" source -qq --download-only kubernetes
[ -f src/Makefile ] || { mkdir -p src; tar -xzf kubernetes_*.orig.tar.gz -C src --strip-components=1; }

# The reflect2 in its vendor folder crashes with Go 1.18 and newer; Debian's package has the version that does not.
reflect=src/vendor/github.com/modern-go/reflect2
rm -f $reflect/*.go $reflect/*.s
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go /usr/share/gocode/src/github.com/modern-go/reflect2/*.s $reflect/

mkdir -p src/.go/src/k8s.io
ln -sfn ../../.. src/.go/src/k8s.io/kubernetes
cd src/.go/src/k8s.io/kubernetes
env -i GOPATH="$dir/src/.go" CGO_ENABLED=0 HOME="$dir/home" PATH=/usr/lib/go/bin:/usr/bin:/bin:/usr/sbin:/sbin \
  make WHAT="${programs[*]/#/cmd/}"
for program in "${programs[@]}"; do cp "$dir"/src/_output/local/bin/linux/*/"$program" "$dir/bin/"; done
# A version number of our own build of an old release: what `kubectl version` shows.
"$dir/bin/kube-apiserver" --version
