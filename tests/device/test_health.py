"""Parsing of the health of accelerators from the text of the vendors' tools."""

from dataclasses import replace
from pathlib import Path

import pytest

from weft.device import health
from weft.device.health import DeviceHealth, parse_npu_map, parse_nvidia, read_health, read_numa_node

# Layout of nvidia-smi -q -x of driver 550 (nvsmi_device_v12.dtd), shortened to the elements that are read.
GPU = """
  <gpu id="{bus}">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <pci>
      <pci_bus_id>{bus}</pci_bus_id>
      <pci_gpu_link_info>
        <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
        <link_widths><max_link_width>16x</max_link_width><current_link_width>{width}x</current_link_width></link_widths>
      </pci_gpu_link_info>
    </pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>{thermal}</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_errors>
      <volatile>
        <sram_correctable>0</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>1</sram_uncorrectable_secded>
        <dram_correctable>7</dram_correctable>
        <dram_uncorrectable>{dram}</dram_uncorrectable>
      </volatile>
      <aggregate>
        <dram_correctable>90</dram_correctable>
        <dram_uncorrectable>80</dram_uncorrectable>
      </aggregate>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_unc>1</remapped_row_unc>
      <remapped_row_pending>{pending}</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <temperature><gpu_temp>34 C</gpu_temp></temperature>
    <gpu_power_readings>
      <power_draw>71.60 W</power_draw>
      <current_power_limit>500.00 W</current_power_limit>
      <default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <clocks><graphics_clock>345 MHz</graphics_clock><sm_clock>345 MHz</sm_clock></clocks>
    <applications_clocks><graphics_clock>1410 MHz</graphics_clock></applications_clocks>
    <default_applications_clocks><graphics_clock>1980 MHz</graphics_clock></default_applications_clocks>
    <max_clocks><graphics_clock>1980 MHz</graphics_clock></max_clocks>
  </gpu>"""


def nvidia(*gpus: str) -> str:
    body = "".join(gpus)
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"  <driver_version>550.54.15</driver_version>\n  <attached_gpus>{len(gpus)}</attached_gpus>{body}\n"
        "</nvidia_smi_log>\n"
    )


def gpu(bus: str, width: int = 16, thermal: str = "Not Active", dram: int = 0, pending: str = "No") -> str:
    return GPU.format(bus=bus, width=width, thermal=thermal, dram=dram, pending=pending)


BUSES = ("00000000:19:00.0", "00000000:3B:00.0")

NVLINK = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-6968dfc2-d444-d92c-c36b-6abe53445cb9)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-7968dfc2-d444-d92c-c36b-6abe53445cb9)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""

DMESG = """[  12.1] nvidia 0000:19:00.0: enabling device (0140 -> 0142)
[8123.4] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[8123.5] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[9000.0] NVRM: Xid (PCI:0000:19:00): 31, pid=79749, name=python, Ch 0000000a, MMU Fault: ENGINE GRAPHICS
"""

NPU_MAP = """	NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
	0                              0                              0                              Ascend 910B2
	0                              1                              -                              Mcu
	1                              0                              1                              Ascend 910B2
	1                              1                              -                              Mcu
"""

NPU_ECC = """        NPU ID                                   : 1
        Chip Count                               : 1

        HBM Single Bit Error Count               : 3
        HBM Double Bit Error Count               : 2
        HBM Single Bit Aggregate Total Err Cnt   : 9
        HBM Double Bit Aggregate Total Err Cnt   : 9
        HBM Single Bit Isolated Pages Count      : 0
        Chip ID                                  : 0
"""

NPU_HEALTH = """        Health Status                  : Alarm
        Error Code                     : 80C98001
        Error Information              : node type=AIC, sensor type=RAS State, event state=module error can not be fixed
"""


def test_a_device_of_nvidia_is_read() -> None:
    first, second = parse_nvidia(nvidia(gpu(BUSES[0]), gpu(BUSES[1], 8, "Active", 3, "Yes")))
    assert first == DeviceHealth(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        bus_id=BUSES[0],
        uncorrected=1,
        corrected=7,
        power_limit=500.0,
        default_power_limit=700.0,
        clock_limit=1410.0,
        max_clock=1980.0,
        pcie_width=16,
        max_pcie_width=16,
        temperature=34.0,
    )
    changes = {"index": 1, "bus_id": BUSES[1], "uncorrected": 4, "pcie_width": 8, "repair": "remapped row pending"}
    assert second == replace(first, **changes, slowed_by=["hw_thermal_slowdown"])


def test_names_of_older_drivers_are_read() -> None:
    text = nvidia(gpu(BUSES[0], thermal="Active"))
    text = text.replace("clocks_event_reason", "clocks_throttle_reason").replace("gpu_power_readings", "power_readings")
    (found,) = parse_nvidia(text.replace("current_power_limit", "power_limit"))
    assert found.slowed_by == ["hw_thermal_slowdown"]
    assert found.power_limit == 500.0


def test_values_that_a_device_does_not_have_are_unknown() -> None:
    text = nvidia(
        '\n  <gpu id="00000000:01:00.0"><product_name>A</product_name><clocks_event_reasons>N/A</clocks_event_reasons></gpu>'
    )
    assert parse_nvidia(text) == [DeviceHealth(0, name="A", bus_id="00000000:01:00.0")]


@pytest.mark.parametrize("text", ["", "No devices were found\n", "<nvidia_smi_log></nvidia_smi_log>"])
def test_text_without_devices_is_empty(text: str) -> None:
    assert parse_nvidia(text) == []


def test_links_and_errors_are_added_to_their_device() -> None:
    devices = parse_nvidia(nvidia(*map(gpu, BUSES)))
    health.add_nvlinks(devices, NVLINK)
    health.add_xids(devices, DMESG)
    assert [(device.links_up, device.links_down) for device in devices] == [(2, 0), (1, 1)]
    assert [device.alarms for device in devices] == [[], ["Xid 79"]]  # 31 is a fault of a program


def test_a_device_of_ascend_is_read() -> None:
    first, second = parse_npu_map(NPU_MAP)
    assert (first.index, first.bus_id, second.index, second.bus_id) == (0, "0", 1, "1")
    health.add_npu_errors(second, NPU_ECC)
    health.add_npu_health(second, NPU_HEALTH)
    health.add_npu_health(first, "        Health                         : OK\n        Error Code   : NA\n")
    health.add_npu_link(second, "link status: DOWN\n")
    health.add_npu_link(first, "link status: UP\n")
    assert (second.uncorrected, second.corrected) == (2, 3)
    assert second.alarms[0].startswith("Alarm: 80C98001: node type=AIC")
    assert first.alarms == []
    assert (first.links_up, second.links_down) == (1, 1)


def test_tools_are_asked_and_the_numa_node_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outputs = {("nvidia-smi", "-q", "-x"): nvidia(gpu(BUSES[0])), ("dmesg",): DMESG}
    monkeypatch.setattr(health, "run_tool", lambda *command: outputs.get(command, ""))
    folder = tmp_path / "bus/pci/devices/0000:19:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    (found,) = read_health("cuda", tmp_path)
    assert found.numa_node == 1
    assert read_numa_node(BUSES[1], tmp_path) is None
    assert read_health("cpu") == []


def test_a_missing_or_failing_tool_gives_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert health.run_tool("sh", "-c", "echo text; exit 1") == ""
    assert health.run_tool("sh", "-c", "echo text") == "text\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert health.run_tool("nvidia-smi") == ""
    assert health.library_versions("cpu") == {}
