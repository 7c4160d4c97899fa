// Device guard of the stand-in NPU: one device whose streams and events are synchronous. torch's guard from Python has no
// streams, and ends the process where a backward uses one.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

struct NpuGuard final : NoOpDeviceGuardImpl<DeviceType::PrivateUse1> {
  Device getDevice() const override { return Device(DeviceType::PrivateUse1, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device, int) const override { return getStream(getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard);

} // namespace c10::impl
