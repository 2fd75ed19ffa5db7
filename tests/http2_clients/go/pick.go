package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modes "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
)

const (
	destination = "x-gateway-destination-endpoint"
	namespace   = "envoy.lb"
	pieceBytes  = 62_000
	mostBytes   = 64 * 1024 // Envoy takes no longer piece of a streamed body.

	duplex   = modes.ProcessingMode_FULL_DUPLEX_STREAMED
	streamed = modes.ProcessingMode_STREAMED
	buffered = modes.ProcessingMode_BUFFERED
)

// pick is one request on a stream of its own, as Envoy sends it in a body mode.
type pick struct {
	stream           extproc.ExternalProcessor_ProcessClient
	mode             modes.ProcessingMode_BodySendMode
	header, metadata string
	returned         []byte
	ended            bool // the returned body
}

// open sends the headers.
func open(
	ctx context.Context, conn *grpc.ClientConn, mode modes.ProcessingMode_BodySendMode, options ...grpc.CallOption,
) (*pick, error) {
	stream, err := extproc.NewExternalProcessorClient(conn).Process(ctx, options...)
	if err != nil {
		return nil, err
	}
	var headers []*core.HeaderValue
	for _, pair := range [][2]string{
		{":method", "POST"}, {":scheme", "http"}, {":authority", "models.example"}, {":path", "/v1/completions"},
		{"content-type", "application/json"},
	} {
		headers = append(headers, &core.HeaderValue{Key: pair[0], RawValue: []byte(pair[1])})
	}
	one := &pick{stream: stream, mode: mode}
	return one, one.send(&extproc.ProcessingRequest{
		Request: &extproc.ProcessingRequest_RequestHeaders{
			RequestHeaders: &extproc.HttpHeaders{Headers: &core.HeaderMap{Headers: headers}},
		},
		ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: mode, ResponseBodyMode: mode},
	})
}

// send says why a stream ended where nothing can be sent any more.
func (p *pick) send(message *extproc.ProcessingRequest) error {
	err := p.stream.Send(message)
	if errors.Is(err, io.EOF) {
		if _, reason := p.stream.Recv(); reason != nil && !errors.Is(reason, io.EOF) {
			return reason
		}
	}
	return err
}

func (p *pick) sendBody(body []byte, end bool) error {
	return p.send(&extproc.ProcessingRequest{
		Request: &extproc.ProcessingRequest_RequestBody{
			RequestBody: &extproc.HttpBody{Body: body, EndOfStream: end},
		},
	})
}

// finish sends the body, reads all answers, and sees the stream end well; → the chosen endpoint.
func (p *pick) finish(body []byte, allowed map[string]bool) (string, error) {
	pieces := [][]byte{body}
	if p.mode != buffered {
		pieces = cut(body)
	}
	var err error
	if p.mode == duplex {
		err = p.duplex(pieces)
	} else {
		err = p.inTurns(pieces)
	}
	if err != nil {
		return "", err
	}
	if err = p.stream.CloseSend(); err != nil {
		return "", err
	}
	if extra, err := p.stream.Recv(); !errors.Is(err, io.EOF) {
		return "", fmt.Errorf("%v, %v instead of the stream's end", extra, err)
	}
	if p.mode == duplex && !bytes.Equal(p.returned, body) {
		return "", fmt.Errorf("%d bytes came back of %d, or others", len(p.returned), len(body))
	}
	if p.header == "" || p.header != p.metadata {
		return "", fmt.Errorf("%s: header %q, metadata %q", p.mode, p.header, p.metadata)
	}
	first, _, _ := strings.Cut(p.header, ",")
	if !allowed[first] {
		return "", fmt.Errorf("%q is no endpoint", first)
	}
	return first, nil
}

func (p *pick) duplex(pieces [][]byte) error {
	for _, piece := range pieces {
		if err := p.sendBody(piece, false); err != nil {
			return err
		}
	}
	if err := p.sendBody(nil, true); err != nil {
		return err
	}
	for !p.ended {
		if err := p.read(); err != nil {
			return err
		}
	}
	return nil
}

func (p *pick) inTurns(pieces [][]byte) error {
	if err := p.read(); err != nil {
		return err
	}
	for at, piece := range pieces {
		if err := p.sendBody(piece, at == len(pieces)-1); err != nil {
			return err
		}
		if err := p.read(); err != nil {
			return err
		}
	}
	return nil
}

// read takes one answer.
func (p *pick) read() error {
	answer, err := p.stream.Recv()
	if err != nil {
		return err
	}
	var common *extproc.CommonResponse
	switch response := answer.Response.(type) {
	case *extproc.ProcessingResponse_RequestHeaders:
		common = response.RequestHeaders.Response
	case *extproc.ProcessingResponse_RequestBody:
		common = response.RequestBody.Response
	default:
		return fmt.Errorf("no answer to a request: %v", answer)
	}
	for _, option := range common.GetHeaderMutation().GetSetHeaders() {
		if strings.EqualFold(option.Header.Key, destination) {
			p.header = string(option.Header.RawValue)
		}
	}
	in := answer.GetDynamicMetadata().GetFields()[namespace].GetStructValue().GetFields()[destination]
	if in != nil {
		p.metadata = in.GetStringValue()
	}
	if piece := common.GetBodyMutation().GetStreamedResponse(); piece != nil {
		if len(piece.Body) > mostBytes {
			return fmt.Errorf("a piece of %d bytes", len(piece.Body))
		}
		p.returned = append(p.returned, piece.Body...)
		p.ended = p.ended || piece.EndOfStream
	}
	return nil
}

func cut(body []byte) [][]byte {
	var pieces [][]byte
	for len(body) > pieceBytes {
		pieces = append(pieces, body[:pieceBytes])
		body = body[pieceBytes:]
	}
	return append(pieces, body)
}
