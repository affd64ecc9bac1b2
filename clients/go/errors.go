package kvfork

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Reason is the stable name of what went wrong. It is an error, so that errors.Is(err, kvfork.QueueFull) asks for it.
type Reason string

func (r Reason) Error() string { return string(r) }

// ErrGone is what the error Is when a snapshot was never there, or is there no more, for whatever reason.
var ErrGone = errors.New("kvfork: the snapshot is gone")

// Error is a call that failed. With errors.As it comes out of every error that this package returns from a call.
//
// errors.Is finds its Reason, ErrGone, and context.Canceled and context.DeadlineExceeded where they fit.
type Error struct {
	Code       codes.Code
	Reason     Reason            // empty if gRPC itself ended the call
	Text       string            // for people
	Metadata   map[string]string // the facts of the text
	Fields     []Field           // the wrong fields of the request
	RetryAfter time.Duration     // when a retry makes sense; 0: not told
	Resource   string            // the name of what was looked for
	Incident   string            // leads to the server's log
}

// Field is one wrong field of a request: its path and what is wrong.
type Field struct{ Path, Text string }

func (e *Error) Error() string {
	name := string(e.Reason)
	if name == "" {
		name = e.Code.String()
	}
	return fmt.Sprintf("kvfork: %s: %s", name, e.Text)
}

// Is makes errors.Is work with reasons, ErrGone and the context's errors.
func (e *Error) Is(target error) bool {
	switch target {
	case ErrGone:
		return e.Code == codes.NotFound && slices.Contains(goneReasons, e.Reason)
	case context.Canceled:
		return e.Code == codes.Canceled
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	}
	reason, ok := target.(Reason)
	return ok && reason == e.Reason
}

// GRPCStatus is the code and text, so that status.Code(err) works too.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Text) }

// AsError is the typed form of an error of a generated client; nil for nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	told, ok := status.FromError(err)
	if !ok { // not gRPC's: a context that ended before the call began
		told = status.FromContextError(err)
	}
	made := &Error{Code: told.Code(), Text: told.Message(), Metadata: map[string]string{}}
	for _, detail := range told.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			made.Reason = Reason(detail.Reason)
			made.Metadata = detail.Metadata
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				made.Fields = append(made.Fields, Field{violation.Field, violation.Description})
			}
		case *errdetails.RetryInfo:
			made.RetryAfter = detail.RetryDelay.AsDuration()
		case *errdetails.ResourceInfo:
			made.Resource = detail.ResourceName
		case *errdetails.RequestInfo:
			made.Incident = detail.RequestId
		}
	}
	return made
}

// typed is AsError as an error, so that nil stays nil.
func typed(err error) error {
	if err == nil {
		return nil
	}
	return AsError(err)
}
