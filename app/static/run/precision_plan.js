// Page of a precision plan: its points as a chart, or the wait for them.
import { insisted, pause } from 'http'
import { createPlot } from 'charts'
import { planFigure } from 'plan_figure'
import { root } from 'root'

const WAIT_MS = 2000

const frame = document.querySelector('[data-plan-of]')
const api = `${root}/api/v1/runs/${frame.dataset.planOf}`
const element = document.querySelector('[data-plan-plot]')
if (element) {
  const plot = createPlot(element, planFigure)
  plot.draw((await (await insisted(`${api}/precision-plan`)).json()).plan)
} else if (frame.dataset.over === 'false') {
  const line = document.querySelector('[data-log-line]')
  for (let status = frame.dataset.status; status === frame.dataset.status;) {
    await pause(WAIT_MS)
    const { log } = await (await insisted(`${api}/log?limit=1`)).json()
    if (log.length && line.textContent !== log[0].text) line.textContent = log[0].text
    status = (await (await insisted(api)).json()).status
  }
  location.reload()
}
