package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	modes "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

func dial(target string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	plain := grpc.WithTransportCredentials(insecure.NewCredentials())
	return grpc.NewClient("passthrough:///"+target, append([]grpc.DialOption{plain}, options...)...)
}

func prompt(number, size int) []byte {
	return fmt.Appendf(nil, `{"model": "tiny", "prompt": "%d %s"}`, number, strings.Repeat("x", size))
}

// many makes `count` picks, `width` at a time.
func many(
	ctx context.Context, s Settings, conn *grpc.ClientConn, mode modes.ProcessingMode_BodySendMode, count, width int,
) error {
	var next atomic.Int64
	var workers sync.WaitGroup
	faults := make([]error, width)
	for worker := range width {
		workers.Go(func() {
			for faults[worker] == nil {
				number := int(next.Add(1))
				if number > count {
					return
				}
				one, err := open(ctx, conn, mode)
				if err == nil {
					_, err = one.finish(prompt(number, number%300), s.endpoints)
				}
				faults[worker] = err
			}
		})
	}
	workers.Wait()
	return errors.Join(faults...)
}

func picks(ctx context.Context, s Settings) (string, error) {
	conn, err := dial(s.target)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	for _, mode := range []modes.ProcessingMode_BodySendMode{duplex, streamed, buffered} {
		if err := many(ctx, s, conn, mode, 1000, 50); err != nil {
			return "", err
		}
	}
	return "1,000 in each of three body modes on 50 streams; headers and metadata name the same endpoint", nil
}

func body(ctx context.Context, s Settings) (string, error) {
	conn, err := dial(s.target)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	sent := prompt(0, 1<<20)
	for _, mode := range []modes.ProcessingMode_BodySendMode{duplex, streamed} {
		one, err := open(ctx, conn, mode)
		if err != nil {
			return "", err
		}
		if _, err = one.finish(sent, s.endpoints); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%d bytes in pieces of %d went and came back whole", len(sent), pieceBytes), nil
}

// cancelled gives up streams at which the picker waits for the rest of a body, half of them after an answer to their
// headers.
func cancelled(ctx context.Context, s Settings) (string, error) {
	conn, err := dial(s.target)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	for number := range 100 {
		inner, cancel := context.WithCancel(ctx)
		one, err := open(inner, conn, []modes.ProcessingMode_BodySendMode{streamed, duplex}[number%2])
		if err == nil && one.mode == streamed {
			err = one.read()
		}
		if err == nil {
			err = one.sendBody(prompt(number, 1000)[:500], false)
		}
		cancel()
		if err != nil {
			return "", err
		}
		if _, err = one.stream.Recv(); status.Code(err) != codes.Canceled {
			return "", fmt.Errorf("%v instead of a cancelled stream", err)
		}
	}
	return "100 streams in the middle of their bodies; the connection went on", many(ctx, s, conn, duplex, 100, 10)
}

func overTLS(ctx context.Context, s Settings) (string, error) {
	secure, err := credentials.NewClientTLSFromFile(s.authority, "localhost")
	if err != nil {
		return "", err
	}
	conn, err := dial(s.tlsTarget, grpc.WithTransportCredentials(secure))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return "100 picks with the picker's certificate verified", many(ctx, s, conn, duplex, 100, 10)
}

// keepAlive holds two connections: one pings as often as grpc-go may, the other says nothing until the picker pings it.
func keepAlive(ctx context.Context, s Settings) (string, error) {
	pings := grpc.WithKeepaliveParams(keepalive.ClientParameters{
		Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true,
	})
	var holding sync.WaitGroup
	var faults [2]error
	for at, options := range [][]grpc.DialOption{{pings}, nil} {
		holding.Go(func() { faults[at] = held(ctx, s, options) })
	}
	holding.Wait()
	return fmt.Sprintf("%s with pings of the client, and as long without", s.hold), errors.Join(faults[:]...)
}

func held(ctx context.Context, s Settings, options []grpc.DialOption) error {
	conn, err := dial(s.target, options...)
	if err != nil {
		return err
	}
	defer conn.Close()
	one, err := open(ctx, conn, duplex)
	if err != nil {
		return err
	}
	holding, cancel := context.WithTimeout(ctx, s.hold)
	defer cancel()
	if conn.WaitForStateChange(holding, connectivity.Ready) {
		return fmt.Errorf("the connection is %s", conn.GetState())
	}
	if _, err = one.finish(prompt(0, 100), s.endpoints); err != nil {
		return err
	}
	return many(ctx, s, conn, duplex, 10, 1)
}

// goaway has the picker stopped in the middle of calls.
func goaway(ctx context.Context, s Settings) (string, error) {
	conn, err := dial(s.target)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	underWay := make([]*pick, 20)
	for at := range underWay {
		if underWay[at], err = open(ctx, conn, duplex); err != nil {
			return "", err
		}
	}
	if err := many(ctx, s, conn, duplex, 1, 1); err != nil { // answered behind them: the picker has seen them all
		return "", err
	}
	fmt.Println("stop")
	if !conn.WaitForStateChange(ctx, connectivity.Ready) {
		return "", errors.New("the picker was stopped and says no GOAWAY")
	}
	if err := refused(ctx, s); err != nil {
		return "", err
	}
	for _, one := range underWay {
		if _, err := one.finish(prompt(0, 1000), s.endpoints); err != nil {
			return "", fmt.Errorf("a call under way: %w", err)
		}
	}
	again, err := open(ctx, conn, duplex, grpc.WaitForReady(true))
	if err == nil {
		_, err = again.finish(prompt(0, 1000), s.endpoints)
	}
	return "20 calls under way were finished, a new channel was refused, the old one connected again", err
}

// refused is well where a new channel finds nobody.
func refused(ctx context.Context, s Settings) error {
	conn, err := dial(s.target)
	if err != nil {
		return err
	}
	defer conn.Close()
	one, err := open(ctx, conn, duplex)
	if err == nil {
		_, err = one.finish(prompt(0, 100), s.endpoints)
	}
	if status.Code(err) != codes.Unavailable {
		return fmt.Errorf("a new channel: %v instead of a refusal", err)
	}
	return nil
}
