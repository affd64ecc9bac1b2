package kvfork

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

func refused(t *testing.T, code codes.Code, details ...protoadapt.MessageV1) error {
	t.Helper()
	with, err := status.New(code, "text").WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return with.Err()
}

func TestEveryDetailIsTold(t *testing.T) {
	err := typed(refused(t, codes.NotFound,
		&errdetails.ErrorInfo{Reason: "SNAPSHOT_EXPIRED", Metadata: map[string]string{"expireTime": "now"}},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "a.b", Description: "c"}}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)},
		&errdetails.ResourceInfo{ResourceName: "snapshots/a"},
		&errdetails.RequestInfo{RequestId: "incident"},
	))
	var failed *Error
	if !errors.As(err, &failed) {
		t.Fatalf("%T is no Error", err)
	}
	if failed.Code != codes.NotFound || failed.Reason != SnapshotExpired || failed.Text != "text" ||
		failed.Metadata["expireTime"] != "now" || failed.RetryAfter != 1500*time.Millisecond ||
		failed.Resource != "snapshots/a" || failed.Incident != "incident" {
		t.Errorf("%+v", failed)
	}
	if len(failed.Fields) != 1 || failed.Fields[0] != (Field{"a.b", "c"}) {
		t.Errorf("fields %+v", failed.Fields)
	}
	if status.Code(err) != codes.NotFound {
		t.Errorf("code %v", status.Code(err))
	}
}

func TestErrorsCanBeAskedFor(t *testing.T) {
	expired := typed(refused(t, codes.NotFound, &errdetails.ErrorInfo{Reason: "SNAPSHOT_EXPIRED"}))
	full := typed(refused(t, codes.ResourceExhausted, &errdetails.ErrorInfo{Reason: "QUEUE_FULL"}))
	none := typed(refused(t, codes.NotFound, &errdetails.ErrorInfo{Reason: "MODEL_NOT_FOUND"}))
	for _, one := range []struct {
		err, target error
		is          bool
	}{
		{expired, ErrGone, true},
		{expired, SnapshotExpired, true},
		{expired, SnapshotDeleted, false},
		{none, ErrGone, false},
		{full, QueueFull, true},
		{full, ErrGone, false},
		{typed(context.Canceled), context.Canceled, true},
		{typed(refused(t, codes.DeadlineExceeded)), context.DeadlineExceeded, true},
		{typed(refused(t, codes.Canceled)), context.DeadlineExceeded, false},
	} {
		if errors.Is(one.err, one.target) != one.is {
			t.Errorf("errors.Is(%v, %v) is not %v", one.err, one.target, one.is)
		}
	}
}

func TestNoErrorStaysNone(t *testing.T) {
	if typed(nil) != nil || AsError(nil) != nil {
		t.Error("an error from nothing")
	}
}
