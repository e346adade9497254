import torch, time; torch.set_num_threads(1)
from memory33 import *
m = EventStore(128, 12, 19)
f = Frames(torch.randn(1,300,128), torch.randn(1,300,12), torch.randn(1,300,4,19)); m.observe(f.x,1.0)
with torch.no_grad():
    s = m.init(1); ts=[]
    for t in range(300):
        a=time.perf_counter(); s,_=m.step(s,f.part(t,t+1)); ts.append(time.perf_counter()-a)
print("step ms median", sorted(ts)[150]*1e3, "p10", sorted(ts)[30]*1e3)
for B,T,ev in ((8,400,False),(8,400,True),(32,32,True)):
    f = Frames(torch.randn(B,T,128), torch.randn(B,T,12), torch.randn(B,T,4,19)); ts=[]
    for _ in range(7):
        a=time.perf_counter(); s,r=m.scan(f,every=ev); (r.z.sum()+r.point.square().sum()).backward(); ts.append(time.perf_counter()-a)
    print("scan fwd+bwd",B,T,"every" if ev else "last","ms median",round(sorted(ts)[3]*1e3,1),"min",round(min(ts)*1e3,1))
