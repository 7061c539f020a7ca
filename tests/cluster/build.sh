#!/bin/bash
# build.sh DIR [PROGRAM ...]: kube-apiserver, kube-controller-manager and kube-scheduler, or the programs named, in DIR/bin, from the
# source package that this machine's own Debian archive carries. Nothing is installed outside DIR but Debian packages.
#
# `make` of the source builds and runs all code generators, and links every cloud's client library: here only the one generator
# whose output the archive lacks is run, and the clouds are left out. Programs that are there already are kept.
set -euo pipefail
dir=$(realpath -m "$1")
shift
programs=("${@:-kube-apiserver}")
[ $# -gt 0 ] || programs+=(kube-controller-manager kube-scheduler)
wanted=()
for program in "${programs[@]}"; do [ -x "$dir/bin/$program" ] || wanted+=("./cmd/$program"); done
[ ${#wanted[@]} -gt 0 ] || exit 0

mkdir -p "$dir"/apt/lists/partial "$dir"/apt/cache/archives/partial "$dir"/bin "$dir"/home
cd "$dir"
packages=(golang-go golang-github-modern-go-reflect2-dev openssl iproute2 dnsmasq-base etcd-server kubernetes-client)
case " ${programs[*]} " in *" kubelet "*) packages+=(gcc libc6-dev containerd runc containernetworking-plugins) ;; esac
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
export GOPATH="$dir/src/.go" GOCACHE="$dir/cache" HOME="$dir/home" GO111MODULE=off CGO_ENABLED=0 GOFLAGS=
if [ ! -f pkg/generated/openapi/zz_generated.openapi.go ]; then
  echo "generating the API's descriptions" >&2
  go build -o "$dir/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  folders=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin vendor/k8s.io/*/ |
    grep -vE 'vendor/k8s.io/(code-generator|sample-apiserver|kube-openapi|gengo)/|_test\.go$|/testdata/' | xargs -n1 dirname | sort -u)
  # shellcheck disable=SC2086
  "$dir/openapi-gen" -h hack/boilerplate/boilerplate.generatego.txt -i "$(printf 'k8s.io/kubernetes/%s,' $folders | sed 's/,$//')" \
    -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi -r "$dir/violations.txt"
fi
echo "compiling ${wanted[*]##*/}: about 5 minutes on two idle cores" >&2
flags="-s -w"
for room in component-base/version client-go/pkg/version; do
  here=k8s.io/kubernetes/vendor/k8s.io/$room
  flags+=" -X $here.gitVersion=v1.20.2 -X $here.gitMajor=1 -X $here.gitMinor=20"
done
go build -tags providerless -o "$dir/bin/" -ldflags "$flags" "${wanted[@]}"
"$dir/bin/${programs[0]}" --version
