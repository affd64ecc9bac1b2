package kvfork

import (
	"context"
	"errors"
	"io"
	"iter"
	"runtime"
	"strings"
	"sync/atomic"

	pb "kvfork.example/go/kvforkv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// Generation is a running generation. One goroutine reads it; Stop and Cancel may come from any.
//
// Whoever stops reading before the end must call Cancel; ranging over Deltas or Events does so when the loop is left.
// A generation that is dropped all the same is cancelled when it is collected as garbage.
type Generation struct {
	client *Client
	source *Snapshot
	stream grpc.ServerStreamingClient[pb.GenerateResponse]
	cancel context.CancelFunc
	given  atomic.Bool // Cancel was called

	started  atomic.Pointer[pb.Started]
	finished *pb.Finished
	end      error // io.EOF after Finished
	marks    map[int]*Snapshot
	snapshot *Snapshot
	text     map[pb.Channel]*strings.Builder
}

// Result is a whole generation. Text is the answer; what a model reasons or calls is told apart where it can be.
type Result struct {
	Text, Reasoning, ToolCalls string
	Finished                   *pb.Finished
	Snapshot                   *Snapshot // the final state, if it was asked for and could be kept
	Marks                      map[int]*Snapshot
}

// Usage is the receipt: prompt_tokens = cached_tokens + recomputed_tokens + new_tokens.
func (r *Result) Usage() *pb.Usage { return r.Finished.GetUsage() }

func (c *Client) generate(ctx context.Context, request *pb.GenerateRequest, source *Snapshot) *Generation {
	request = proto.CloneOf(request)
	request.Input = continued(request.Input, request.Parent)
	ctx, cancel := context.WithCancel(ctx)
	g := &Generation{
		client: c, source: source, cancel: cancel, marks: map[int]*Snapshot{}, text: map[pb.Channel]*strings.Builder{},
	}
	stream, err := c.inference.Generate(ctx, request)
	if err != nil {
		g.fail(err)
		return g
	}
	g.stream = stream
	runtime.AddCleanup(g, func(cancel context.CancelFunc) { cancel() }, cancel)
	return g
}

// Next is the next event; io.EOF after Finished, and else the error that ended the stream, however often it is asked.
func (g *Generation) Next() (*pb.GenerateResponse, error) {
	if g.end != nil {
		return nil, g.end
	}
	event, err := g.stream.Recv()
	if err != nil {
		return nil, g.fail(err)
	}
	switch event := event.Event.(type) {
	case *pb.GenerateResponse_Started:
		g.started.Store(event.Started)
	case *pb.GenerateResponse_Marked:
		if event.Marked.Snapshot != nil {
			g.marks[int(event.Marked.Mark)] = g.client.handle(event.Marked.Snapshot, nil)
		}
	case *pb.GenerateResponse_Delta:
		text := g.text[event.Delta.Channel]
		if text == nil {
			text = &strings.Builder{}
			g.text[event.Delta.Channel] = text
		}
		text.WriteString(event.Delta.Text)
	case *pb.GenerateResponse_Finished:
		g.finished = event.Finished
		if event.Finished.Snapshot != nil {
			g.snapshot = g.client.handle(event.Finished.Snapshot, event.Finished.Usage)
		}
		g.end = io.EOF
		g.stream.Recv() // takes the status, so that the server does not see a cancellation; Finished was whole
		g.cancel()
	}
	return event, nil
}

// Events ranges over everything that the server says. Leaving the loop cancels. An error comes last.
func (g *Generation) Events() iter.Seq2[*pb.GenerateResponse, error] {
	return func(yield func(*pb.GenerateResponse, error) bool) {
		defer g.Cancel()
		for {
			event, err := g.Next()
			if errors.Is(err, io.EOF) || !yield(event, err) || err != nil {
				return
			}
		}
	}
}

// Deltas ranges over the text. Leaving the loop cancels. An error comes last.
func (g *Generation) Deltas() iter.Seq2[*pb.Delta, error] {
	return func(yield func(*pb.Delta, error) bool) {
		for event, err := range g.Events() {
			if delta := event.GetDelta(); (delta != nil || err != nil) && !yield(delta, err) {
				return
			}
		}
	}
}

// Result reads to the end.
func (g *Generation) Result() (*Result, error) {
	for {
		if _, err := g.Next(); errors.Is(err, io.EOF) {
			return &Result{
				Text:      g.said(pb.Channel_CHANNEL_UNSPECIFIED),
				Reasoning: g.said(pb.Channel_CHANNEL_REASONING),
				ToolCalls: g.said(pb.Channel_CHANNEL_TOOL_CALL),
				Finished:  g.finished, Snapshot: g.snapshot, Marks: g.marks,
			}, nil
		} else if err != nil {
			return nil, err
		}
	}
}

// Stop asks the server to end cleanly: read on, and Finished still comes, with receipt and snapshot. False if it had
// ended. It can be used once Started was read.
func (g *Generation) Stop(ctx context.Context) (bool, error) {
	started := g.started.Load()
	if started == nil {
		return false, errors.New("kvfork: the generation has no name before Started was read")
	}
	return g.client.Stop(ctx, started.Generation)
}

// Cancel gives up at once: nobody computes for nobody. Nothing more will come. After the end it does nothing.
func (g *Generation) Cancel() {
	g.given.Store(true)
	g.cancel()
}

// Started is what the server said first; nil before it was read.
func (g *Generation) Started() *pb.Started { return g.started.Load() }

// Marks are the snapshots made so far, by the index of their mark.
func (g *Generation) Marks() map[int]*Snapshot { return g.marks }

func (g *Generation) said(channel pb.Channel) string {
	if text := g.text[channel]; text != nil {
		return text.String()
	}
	return ""
}

func (g *Generation) fail(err error) error {
	g.cancel()
	failed := AsError(err)
	if errors.Is(err, io.EOF) {
		failed = &Error{Code: codes.Internal, Reason: Truncated, Text: "the stream ended without Finished"}
	}
	if g.given.Load() {
		failed = &Error{Code: codes.Canceled, Text: "cancelled by the caller"}
	}
	g.end = failed
	if g.source != nil {
		g.source.noted(failed)
	}
	return failed
}
