// Program http2-go asks an endpoint picker by grpc-go, and says in one line for each check what it found.
//
// It is run by tests/support/http2_clients.py, which stops the picker when a line says "stop", and starts it again.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

// Settings are where the pickers are, and what they may choose from.
type Settings struct {
	target, tlsTarget, authority string
	endpoints                    map[string]bool
	hold                         time.Duration
}

// A check returns what it found, in words.
type check struct {
	name string
	run  func(context.Context, Settings) (string, error)
}

var checks = []check{
	{"picks", picks},
	{"body", body},
	{"cancel", cancelled},
	{"tls", overTLS},
	{"keepalive", keepAlive},
	{"goaway", goaway},
}

func main() {
	var settings Settings
	flag.StringVar(&settings.target, "target", "", "host:port of the picker")
	flag.StringVar(&settings.tlsTarget, "tls-target", "", "host:port of a picker with TLS")
	flag.StringVar(&settings.authority, "ca", "", "file with the certificate that it shows")
	endpoints := flag.String("endpoints", "", "host:port,… that both may choose")
	flag.DurationVar(&settings.hold, "hold", 65*time.Second, "how long keepalive holds a connection")
	only := flag.String("only", "", "name,… of the checks to run")
	limit := flag.Duration("limit", 2*time.Minute, "of one check")
	flag.Parse()
	settings.endpoints = set(*endpoints)
	chosen := set(*only)

	failed := false
	for _, each := range checks {
		if len(chosen) > 0 && !chosen[each.name] {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), *limit)
		found, err := each.run(ctx, settings)
		cancel()
		if err != nil {
			failed = true
			fmt.Printf("FAILED %s: %v\n", each.name, err)
		} else {
			fmt.Printf("ok %s: %s\n", each.name, found)
		}
	}
	if failed {
		os.Exit(1)
	}
}

func set(text string) map[string]bool {
	found := map[string]bool{}
	for _, word := range strings.Split(text, ",") {
		if word != "" {
			found[word] = true
		}
	}
	return found
}
